"""Views: logical tensors and values of a checkpoint of any format and layout, and what is read through them."""
