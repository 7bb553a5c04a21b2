"""What every room speaks of: rows, the canvas, features, the budget and its ledger, events and errors."""
