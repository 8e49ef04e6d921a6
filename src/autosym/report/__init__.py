"""What was learned in words and pictures, as one HTML file."""
