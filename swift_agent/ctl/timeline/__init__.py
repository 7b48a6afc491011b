"""What a job went through: from its records, or from journals, to a text and to a page."""
