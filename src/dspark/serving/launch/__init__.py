"""Commands that serve a pair with vLLM, SGLang or llama.cpp."""
