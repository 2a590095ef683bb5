"""Import other people's data: tables, WebDataset archives and Hugging Face data sets."""
