"""What does an unhealthy replica compute otherwise than a healthy one, and what follows from it?"""
