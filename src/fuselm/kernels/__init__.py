"""The kernels: CUDA sources, one contract per op, the bindings and how they are built. See spec.py for the map."""
