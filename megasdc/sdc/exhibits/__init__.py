"""What submodules were given and what they made of it, and its elements in fp64: for the referee."""
