use planner::{
    restrict::Restrictions,
    search::{Task, search},
};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let model = models::model::shipped(&a[1]).unwrap().unwrap();
    let cluster = models::cluster::shipped(&a[2]).unwrap().unwrap();
    let gpus: u64 = a[3].parse().unwrap();
    let r = Restrictions::parse(&a[4..]).unwrap();
    let task = Task::new(&model, &cluster, gpus, &r);
    let t = std::time::Instant::now();
    let nodes = task.space().nodes().len();
    println!("nodes {nodes} in {:?}", t.elapsed());
    let out = search(&task, &mut |_, _| {});
    println!("{:#?}", out.proof);
    if let Some(b) = out.best {
        println!("{:?}\n{:?}\n{:?}", b.decisions, b.priced.iteration_s, b.priced.breakdown);
        println!(
            "{:?}",
            b.placed.iter().map(|s| (s.end - s.start, s.mix.clone())).collect::<Vec<_>>()
        );
        println!("{:?}", b.priced.device_bytes.iter().map(|b| b / 1e9).collect::<Vec<_>>());
    }
}
