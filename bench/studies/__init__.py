"""What there is to measure, a module each: its points, what measures one, and the tables read from the rows."""
