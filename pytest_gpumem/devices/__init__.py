"""CUDA and simulated devices behind one protocol; `opening` opens them."""
