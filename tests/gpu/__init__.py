"""What runs on a GPU: parts of ``tests/gpu.sh``, each in processes of its own under a time limit."""
