"""The second branch of contrastive methods: its inputs, and its rows next to the clean ones."""
