//! Matrices in slices, their tiles for several threads, and the serial product of views. All unsafe
//! code of the crate's CPU kernels is here.
#![allow(unsafe_code)] // raw pointers of the GEMM, and tiles that share rows

use crate::Real;
use std::marker::PhantomData;
use std::ops::Range;

/// A matrix to read, with any strides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixView<'a, T> {
    /// Starts at the first element.
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> MatrixView<'a, T> {
    /// `rows` rows of `columns` elements, `leading` elements apart.
    #[track_caller]
    pub(crate) fn new(data: &'a [T], rows: usize, columns: usize, leading: usize) -> Self {
        crate::check::at_least("matrix", data.len(), span(rows, columns, leading));
        Self { data, rows, columns, row_stride: leading, column_stride: 1 }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// The transpose.
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// One row, whose elements must be adjacent.
    #[track_caller]
    pub(crate) fn row(self, row: usize) -> &'a [T] {
        assert!(row < self.rows && self.column_stride == 1, "no such row");
        &self.data[row * self.row_stride..row * self.row_stride + self.columns]
    }

    /// A range of rows and columns.
    #[track_caller]
    pub(crate) fn block(self, rows: Range<usize>, columns: Range<usize>) -> Self {
        assert!(rows.end <= self.rows && columns.end <= self.columns, "block outside its matrix");
        let start = rows.start * self.row_stride + columns.start * self.column_stride;
        let data = &self.data[start.min(self.data.len())..];
        Self { data, rows: rows.len(), columns: columns.len(), ..self }
    }
}

/// A matrix to write. The elements between its rows belong to others.
#[derive(Debug)]
pub(crate) struct MatrixViewMut<'a, T> {
    start: *mut T,
    rows: usize,
    columns: usize,
    leading: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: a view is an exclusive borrow of its elements, and no two live views share any (see
// `new`, `Tiles`).
unsafe impl<T: Send> Send for MatrixViewMut<'_, T> {}

impl<'a, T> MatrixViewMut<'a, T> {
    /// `rows` rows of `columns` elements, `leading` elements apart.
    #[track_caller]
    pub(crate) fn new(data: &'a mut [T], rows: usize, columns: usize, leading: usize) -> Self {
        assert!(leading >= columns, "rows of a matrix overlap");
        crate::check::at_least("matrix", data.len(), span(rows, columns, leading));
        Self { start: data.as_mut_ptr(), rows, columns, leading, borrowed: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// One row.
    #[track_caller]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row outside its matrix");
        // SAFETY: the row lies in the borrowed elements and is this view's alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.leading), self.columns) }
    }

    /// A range of rows and columns, borrowed from this view.
    #[track_caller]
    pub(crate) fn block(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> MatrixViewMut<'_, T> {
        let ordered = rows.start <= rows.end && columns.start <= columns.end;
        let inside = rows.end <= self.rows && columns.end <= self.columns;
        assert!(ordered && inside, "block outside its matrix");
        let empty = rows.is_empty() || columns.is_empty();
        let offset = if empty { 0 } else { rows.start * self.leading + columns.start };
        MatrixViewMut {
            // SAFETY: the first element of a non-empty block is an element of this view.
            start: unsafe { self.start.add(offset) },
            rows: rows.len(),
            columns: columns.len(),
            leading: self.leading,
            borrowed: PhantomData,
        }
    }
}

/// How a batch of equal matrices is cut into tiles. Tiles are numbered by matrix, then column, then
/// row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub matrices: usize,
    /// Elements from one matrix to the next.
    pub stride: usize,
    pub rows: usize,
    pub columns: usize,
    pub leading: usize,
    pub tile_rows: usize,
    pub tile_columns: usize,
}

impl Grid {
    /// Number of rows and columns of tiles in each matrix.
    fn tiles(&self) -> (usize, usize) {
        (self.rows.div_ceil(self.tile_rows), self.columns.div_ceil(self.tile_columns))
    }

    /// Position of tile `number`: matrix, rows, columns.
    pub(crate) fn place(&self, number: usize) -> (usize, Range<usize>, Range<usize>) {
        let (down, across) = self.tiles();
        let (matrix, within) = (number / (down * across), number % (down * across));
        let (row, column) = (within % down * self.tile_rows, within / down * self.tile_columns);
        let (bottom, right) = (row + self.tile_rows, column + self.tile_columns);
        (matrix, row..bottom.min(self.rows), column..right.min(self.columns))
    }

    /// The tiles of `data`, each with its number.
    #[track_caller]
    pub(crate) fn cut<T>(self, data: &mut [T]) -> Tiles<'_, T> {
        assert!(self.tile_rows > 0 && self.tile_columns > 0, "tiles of no size");
        assert!(self.leading >= self.columns, "rows of a matrix overlap");
        let one = span(self.rows, self.columns, self.leading);
        let (down, across) = self.tiles();
        let number = if one == 0 { 0 } else { self.matrices * down * across };
        if number > 0 {
            assert!(self.matrices == 1 || self.stride >= one, "matrices overlap");
            crate::check::at_least("matrices", data.len(), (self.matrices - 1) * self.stride + one);
        }
        Tiles { grid: self, next: 0, end: number, start: data.as_mut_ptr(), borrowed: PhantomData }
    }
}

/// All tiles of a [`Grid`].
pub(crate) struct Tiles<'a, T> {
    grid: Grid,
    next: usize,
    end: usize,
    start: *mut T,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it holds an exclusive borrow of elements that may be sent.
unsafe impl<T: Send> Send for Tiles<'_, T> {}

impl<'a, T> Iterator for Tiles<'a, T> {
    type Item = (usize, MatrixViewMut<'a, T>);

    fn next(&mut self) -> Option<Self::Item> {
        let number = (self.next < self.end).then_some(self.next)?;
        self.next += 1;
        let (matrix, rows, columns) = self.grid.place(number);
        let offset = matrix * self.grid.stride + rows.start * self.grid.leading + columns.start;
        let view = MatrixViewMut {
            // SAFETY: `cut` checked that every matrix lies in the borrowed elements, and tiles of a
            // grid are disjoint: rows and matrices do not overlap, and each number is handed out
            // once.
            start: unsafe { self.start.add(offset) },
            rows: rows.len(),
            columns: columns.len(),
            leading: self.grid.leading,
            borrowed: PhantomData,
        };
        Some((number, view))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }
}

/// Elements from the first to the last of a matrix, including the gaps between rows.
pub(crate) const fn span(rows: usize, columns: usize, leading: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * leading + columns }
}

/// `c = alpha a b + beta c` on the calling thread. With `beta = 0` the old `c` is not read.
#[track_caller]
pub(crate) fn multiply<T: Real>(
    alpha: T,
    a: MatrixView<T>,
    b: MatrixView<T>,
    beta: T,
    c: &mut MatrixViewMut<T>,
) {
    let fits = a.rows == c.rows && b.columns == c.columns && a.columns == b.rows;
    assert!(fits, "matrices of a product do not fit each other");
    // SAFETY: every view covers its rows and columns at its strides, `c` is borrowed exclusively,
    // and elements are f32 or f64 (`Real` is sealed), which the crate supports. Strides of slices
    // fit isize.
    unsafe {
        gemm::gemm(
            c.rows,
            c.columns,
            a.columns,
            c.start,
            1,
            c.leading as isize,
            beta != T::ZERO,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            beta,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each element of each matrix is in exactly one tile, and tiles lie where `place` says.
        #[test]
        fn tiles_are_disjoint_and_all(
            matrices in 0usize..4, rows in 0usize..12, columns in 0usize..12, gap in 0usize..3, space in 0usize..5,
            tile_rows in 1usize..6, tile_columns in 1usize..6,
        ) {
            let leading = columns + gap;
            let stride = rows * leading + space;
            let grid = Grid { matrices, stride, rows, columns, leading, tile_rows, tile_columns };
            let mut data = vec![0; matrices * stride];
            for (number, mut tile) in grid.cut(&mut data) {
                let (_, down, across) = grid.place(number);
                prop_assert_eq!([tile.rows(), tile.columns()], [down.len(), across.len()]);
                for row in 0..tile.rows() {
                    tile.row(row).iter_mut().for_each(|x| *x += 1 + number);
                }
            }
            for (at, &x) in data.iter().enumerate() {
                let (matrix, row, column) = (at / stride, at % stride / leading.max(1), at % stride % leading.max(1));
                let inside = row < rows && column < columns;
                prop_assert_eq!(x > 0, inside);
                if inside {
                    let (of, down, across) = grid.place(x - 1);
                    prop_assert!(of == matrix && down.contains(&row) && across.contains(&column));
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows of a matrix overlap")]
    fn overlapping_rows_are_refused() {
        let _ = MatrixViewMut::new(&mut [0; 10], 3, 4, 3);
    }

    #[test]
    #[should_panic(expected = "matrices overlap")]
    fn overlapping_matrices_are_refused() {
        let grid = Grid {
            matrices: 2,
            stride: 3,
            rows: 2,
            columns: 2,
            leading: 2,
            tile_rows: 1,
            tile_columns: 1,
        };
        let _ = grid.cut(&mut [0; 10]);
    }

    #[test]
    #[should_panic(expected = "matrix has 9 elements where the shape needs 10")]
    fn short_slices_are_refused() {
        let _ = MatrixView::new(&[0; 9], 3, 2, 4);
    }

    #[test]
    #[should_panic(expected = "block outside its matrix")]
    fn blocks_stay_inside() {
        let mut data = [0; 12];
        let _ = MatrixViewMut::new(&mut data, 3, 4, 4).block(1..3, 2..5);
    }

    #[test]
    fn products_of_blocks() {
        let a: Vec<f64> = (0..12).map(f64::from).collect();
        let mut c = vec![1.0; 9];
        let (a, mut c_view) = (MatrixView::new(&a, 3, 4, 4), MatrixViewMut::new(&mut c, 3, 3, 3));
        multiply(
            2.0,
            a.block(1..3, 1..3),
            a.block(0..2, 0..2).transposed(),
            1.0,
            &mut c_view.block(1..3, 0..2),
        );
        // [5 6; 9 10] [0 4; 1 5]
        assert_eq!(c, [1.0, 1.0, 1.0, 13.0, 101.0, 1.0, 21.0, 173.0, 1.0]);
    }
}
