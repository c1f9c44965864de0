"""Speed of training, starting and preparing data; memory of a step."""
