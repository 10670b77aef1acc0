"""Language models in PyTorch: the model, its training and its runner."""
