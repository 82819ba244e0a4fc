//! C functions of a library that is loaded at run time.

/// Declares `Functions`, a struct of a library's functions under their C names, and its loader.
macro_rules! functions {
    ($seen:vis, $($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)+) => {
        /// The functions in use.
        #[allow(non_snake_case)]
        #[derive(Clone, Copy)]
        $seen struct Functions {
            $($seen $name: unsafe extern "C" fn($($argument: $type),*) -> $result,)+
        }

        impl Functions {
            /// # Safety
            /// The library has these functions, with these types.
            unsafe fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header, as the caller says.
                unsafe {
                    Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)+ })
                }
            }
        }
    };
}

pub(super) use functions;
