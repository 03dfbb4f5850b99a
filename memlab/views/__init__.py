"""Value -> picture: theme, tables, figures, the live view."""
