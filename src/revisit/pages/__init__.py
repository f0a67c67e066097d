"""Self-contained HTML pages: documents, styles and scripts."""
