//! Products as three loops, on the emulator's memory.
#![allow(unsafe_code)] // memory by address

use super::State;
use crate::cuda::product::{Matrix, Product};
use crate::cuda::{GpuError, Storage};
use half::bf16;

/// A column-major matrix in memory.
struct Elements {
    start: *mut u8,
    storage: Storage,
    leading: usize,
}

impl Elements {
    fn new(state: &State, matrix: &Matrix, address: u64) -> Result<Self, GpuError> {
        let storage = matrix.storage;
        let count = match (matrix.rows, matrix.columns) {
            (0, _) | (_, 0) => 0,
            (rows, columns) => (columns - 1) * matrix.leading + rows,
        };
        let start = match count {
            0 => std::ptr::null_mut(),
            _ => state.bytes(address, count * storage.bytes())?,
        };
        Ok(Self { start, storage, leading: matrix.leading })
    }

    fn at(&self, row: usize, column: usize) -> *mut u8 {
        // SAFETY: callers stay within the rows and columns that `new` checked.
        unsafe { self.start.add((column * self.leading + row) * self.storage.bytes()) }
    }

    fn read(&self, row: usize, column: usize) -> f32 {
        let at = self.at(row, column);
        // SAFETY: as above; the reads need no alignment.
        unsafe {
            match self.storage {
                Storage::F32 => at.cast::<f32>().read_unaligned(),
                Storage::Bf16 => at.cast::<bf16>().read_unaligned().to_f32(),
            }
        }
    }

    fn write(&self, row: usize, column: usize, value: f32) {
        let at = self.at(row, column);
        // SAFETY: as above.
        unsafe {
            match self.storage {
                Storage::F32 => at.cast::<f32>().write_unaligned(value),
                Storage::Bf16 => at.cast::<bf16>().write_unaligned(bf16::from_f32(value)),
            }
        }
    }
}

/// The column-major product `D = alpha op(A) op(B) + beta D`, with an optional bias.
pub(super) fn multiply(state: &State, product: &Product) -> Result<(), GpuError> {
    let offset =
        |matrix: &Matrix, number: usize| (number * matrix.stride * matrix.storage.bytes()) as u64;
    for number in 0..product.count {
        let a = Elements::new(state, &product.a, product.a.address + offset(&product.a, number))?;
        let b = Elements::new(state, &product.b, product.b.address + offset(&product.b, number))?;
        let d = Elements::new(state, &product.d, product.d.address + offset(&product.d, number))?;
        let bias =
            Matrix { rows: product.d.rows, columns: 1, leading: product.d.rows, ..product.d };
        let bias = product.bias.map(|address| Elements::new(state, &bias, address)).transpose()?;
        for column in 0..product.d.columns {
            for row in 0..product.d.rows {
                let mut sum = 0.0_f64;
                for k in 0..product.k {
                    let left = if product.a.transposed { a.read(k, row) } else { a.read(row, k) };
                    let right =
                        if product.b.transposed { b.read(column, k) } else { b.read(k, column) };
                    sum += f64::from(left) * f64::from(right);
                }
                #[allow(clippy::cast_possible_truncation)]
                let mut value = product.alpha * sum as f32;
                if product.beta != 0.0 {
                    value += product.beta * d.read(row, column);
                }
                if let Some(bias) = &bias {
                    value += bias.read(row, 0);
                }
                d.write(row, column, value);
            }
        }
    }
    state.check_guards(product)
}
