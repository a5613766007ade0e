"""Training on one process: recipes, features, anchors, loss, state, the loop. Start at `trainer.train`."""
