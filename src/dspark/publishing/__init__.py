"""A draft made public: its model card, the checks before it goes out, and the upload."""
