"""Tasks of lm-eval on local data: one YAML file each, and the code that they name."""
