"""The fine-tuning command: one YAML file in, a trained model or adapter out."""
