"""Public data sets: from their official files to records that a task family can ask."""
