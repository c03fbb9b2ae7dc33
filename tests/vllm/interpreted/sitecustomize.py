"""Python imports this at its start, in the engine's processes too: vLLM's V2 runner on the CPU.

That runner prepares its steps by Triton kernels, which Triton's interpreter runs there. vLLM asks for a backend of
Triton's that compiles for CPUs, and with the interpreter never uses it.
"""

import os
from types import SimpleNamespace

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
