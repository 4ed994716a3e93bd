package sql

// DoctorFacts returns the query for what posthaste doctor wants to know of the server. It needs no schema.
func DoctorFacts() string { return query("doctor_facts") }

// DoctorPublication returns the query whether the publication $1 announces inserts into the outbox, and whether the role
// may create tables beside it.
func DoctorPublication() string { return query("doctor_publication") }

// DoctorSlot returns the query for the slot named $1.
func DoctorSlot() string { return query("doctor_slot") }

// DoctorCapacity returns the query for what grows: the WAL written and the seconds it took, the sizes of the outbox and of
// the history, and the day (YYYYMMDD, "" for none) of the oldest history partition that holds anything.
func DoctorCapacity() string { return query("doctor_capacity") }
