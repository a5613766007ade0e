"""Other engines on the same prompts: each lives in a child process under an interpreter that has it installed."""
