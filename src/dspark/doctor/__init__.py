"""The pair check: what of a target and a draft fits, what loses, what is broken, and what it would gain."""
