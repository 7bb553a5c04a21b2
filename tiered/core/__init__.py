"""What every room speaks of: rows, the canvas, features, sizes, the budget and its ledger, events and errors."""
