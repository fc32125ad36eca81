"""The suite that every world passes: `suite` runs it, `exchange` holds the cases of the backends."""
