"""How is the model in the box made? `python -m tools.train_demo.train` does all of it."""
