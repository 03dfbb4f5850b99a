"""Value -> text, HTML and figures: theme, tables, the live view."""
