"""Under TRITON_INTERPRET=1, Triton's interpreter is put in order before a test imports a kernel."""

from __future__ import annotations

from tests.gpu.device import INTERPRETED, require_pinned_triton

if INTERPRETED:
    require_pinned_triton()
    from tests.gpu import interpreter

    interpreter.install()
