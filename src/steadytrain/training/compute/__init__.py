"""How a pass is computed: number formats, compiled code and graphs, recomputed activations."""
