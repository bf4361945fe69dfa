# What gunicorn serves.


def app(environ, start):
    start('200 OK', [('Content-Type', 'text/plain'), ('Content-Length', '600')])
    return [b'x' * 600]
