//! The event loop's epoll.
