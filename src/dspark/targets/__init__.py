"""Targets: frozen causal LMs behind one interface (`base.py`), and the one that comes by pip (`embedded.py`)."""
