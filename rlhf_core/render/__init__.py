"""Reports on runs: self-contained HTML pages, Markdown, plots, and exports to other tools."""
