"""Shared types: rows, the canvas, features, the budget and its ledger, events and errors."""
