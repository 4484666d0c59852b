"""What a person sees: progress bars, tables, figures."""
