"""The paper's tables and studies: grids, ablations, latency, and what vision tokens and output distributions contain."""
