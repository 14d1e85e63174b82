"""The text field and the drawer of the model's behaviour, with the model picker."""
