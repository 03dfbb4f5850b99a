"""Models of other libraries, built from a configuration: name -> a function that makes (model, batch maker)."""
