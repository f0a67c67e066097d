"""The second branch of contrastive methods: its inputs and its rows beside the clean ones."""
