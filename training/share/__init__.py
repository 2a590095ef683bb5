"""Models that travel: pack a trained run into a folder, and exchange the folder through the Hugging Face hub."""
