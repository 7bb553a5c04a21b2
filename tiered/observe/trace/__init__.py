"""What a call does when: named ranges of compute, copies and waits on one clock."""
