"""Mathematical questions that are solved with a Python tool and answered in a box."""
