"""The temperatures that there are, for what refuses others before it needs torch."""

MIN_TEMPERATURE = 1e-5  # logits / temperature must not overflow; vLLM takes what is below it for greedy
MAX_TEMPERATURE = 1e18  # the GPU's kernel divides exactly up to 2**90; all tokens are as likely long before
