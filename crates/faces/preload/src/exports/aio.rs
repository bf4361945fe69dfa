//! POSIX asynchronous I/O.
//!
//! The C library performs it in its own threads, which call the kernel. A connection that has not changed over stays on TCP. On
//! a connection that has changed over, asynchronous I/O fails with ENOSYS.

use crate::exports::io::connection;
use crate::system::errno::fail;
use crate::system::real;
use libc::{aiocb, c_int, sigevent};

/// Returns whether the kernel may read from the descriptor or write to it.
fn is_the_kernels(fd: c_int) -> bool {
    connection(fd).is_none_or(|call| {
        let socket = call.what();
        crate::served::giving_back::give_back(socket);
        crate::daemon::session::stays(socket, "asynchronous I/O (aio_read, aio_write)");
        !socket.is_joined() && !socket.cache.has_answers()
    })
}

macro_rules! aio {
    ($($name:ident;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(control: *mut aiocb) -> c_int {
            // SAFETY: the program obeys the rules of the function.
            match unsafe { is_the_kernels((*control).aio_fildes) } {
                // SAFETY: the program passes a control block, and leaves it and its buffer alone until the operation is over.
                true => unsafe { real::$name(control) },
                false => fail(libc::ENOSYS),
            }
        }
    )*};
}

aio! {
    aio_read;
    aio_write;
    aio_read64;
    aio_write64;
}

macro_rules! lists {
    ($($name:ident;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            mode: c_int,
            list: *const *mut aiocb,
            count: c_int,
            event: *mut sigevent,
        ) -> c_int {
            for i in 0..usize::try_from(count).unwrap_or(0) {
                // SAFETY: the program obeys the rules of the function. A null entry is ignored.
                if let Some(control) = unsafe { (*list.add(i)).as_ref() }
                    && control.aio_lio_opcode != libc::LIO_NOP
                    && !is_the_kernels(control.aio_fildes)
                {
                    return fail(libc::ENOSYS);
                }
            }
            // SAFETY: the program passes `count` entries, each null or a control block that it leaves alone until its
            // operation is over.
            unsafe { real::$name(mode, list, count, event) }
        }
    )*};
}

lists! {
    lio_listio;
    lio_listio64;
}
