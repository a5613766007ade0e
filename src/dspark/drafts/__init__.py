"""Draft models: the DFlash backbone with DSpark's Markov and confidence heads."""
