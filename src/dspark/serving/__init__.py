"""The OpenAI-compatible server: an engine in a thread, its requests over HTTP."""
