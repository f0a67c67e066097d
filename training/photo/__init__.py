"""The embedded model `photo`: a pretrained vision transformer and SmolLM2-135M, joined on photographs."""
