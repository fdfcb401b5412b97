//! Several futures polled together, each with its number.
//!
//! They live inside the caller's own future: dropped with it, none of them runs on.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

type Numbered<'a, T> = (usize, Pin<Box<dyn Future<Output = T> + Send + 'a>>);

/// Futures that still run.
pub(crate) struct Each<'a, T>(Vec<Numbered<'a, T>>);

impl<'a, T> Each<'a, T> {
    /// One future for each number.
    pub(crate) fn new<F>(numbers: impl IntoIterator<Item = usize>, of: impl Fn(usize) -> F) -> Self
    where
        F: Future<Output = T> + Send + 'a,
    {
        let boxed = |n| (n, Box::pin(of(n)) as Pin<Box<dyn Future<Output = T> + Send + 'a>>);
        Self(numbers.into_iter().map(boxed).collect())
    }

    /// The next that is done; none once all were.
    pub(crate) async fn next(&mut self) -> Option<(usize, T)> {
        poll_fn(|cx| {
            for at in 0..self.0.len() {
                if let Poll::Ready(output) = self.0[at].1.as_mut().poll(cx) {
                    return Poll::Ready(Some((self.0.swap_remove(at).0, output)));
                }
            }
            if self.0.is_empty() { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }
}
