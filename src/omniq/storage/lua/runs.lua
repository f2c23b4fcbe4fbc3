--[[
The common cases in few commands: enqueues of one shape, acks and leases of plain tasks.

They write the same keys as the operations do: hashes at once, and what gathers for the sorted sets as they do (`q.ahead`: of
whom; whoever reads such a hash writes the sets first). A plain task is ours, in no group, waits for nobody, nobody waits for it,
and nobody asked to cancel it. Whatever is not plain, and whatever this call has touched before, takes the long way.
]]

local SOME = 1000 -- rows that are looked up together

local function expand(op, i)
  local fields = {'id', op.rows[i], 'payload', op.rows[i + 1]}
  for _, value in ipairs(op.fields) do fields[#fields + 1] = value end
  return {
    kind = 'enqueue', queue = op.queue, id = op.rows[i], name = op.name, fields = fields, lease = op.lease, ttl = op.ttl,
    fingerprint = op.rows[i + 2], on_conflict = op.on_conflict, options = op.options,
    data = '{"payload_bytes":' .. (op.empty and 0 or #op.rows[i + 1]) .. '}',
  }
end

local function insert(q, op, common, i)
  machine.promote(q, PROMOTE_LIMIT)
  q.enqueued, q.changed, ready_queues[q.name] = true, true, true
  local id, payload, seq = op.rows[i], op.rows[i + 1], digits(next_seq(q))
  local origin = store.origin(NOW, seq, op.ttl, op.name, op.rows[i + 2], op.options)
  run('HSET', q.job .. id, 'id', id, 'payload', payload, 'o', origin, unpack(common))
  lanes.push(q.base .. 'wait', id)
  add(q, 'idx:wait', NOW, id)
  add(q, 'o:tasks', seq, id)
  cache[slot(q, id)], q.ahead[id], absent[id] = nil, true, nil
  if request.events then
    local data = '{"payload_bytes":' .. TEXT[op.empty and 0 or #payload] .. '}'
    log.add(q, 'enqueued', id, op.name, false, 0, false, now, now, CODE.wait, data)
  end
end

local staging

-- The hashes of staged tasks, of all queues that have any.
local function all_staged(names)
  if not staging then
    staging = {}
    local keys = {}
    for i, base in ipairs(names) do keys[i] = base .. 'o:staged' end
    if exist(keys) then
      for _, key in ipairs(keys) do
        if run('EXISTS', key) == 1 then staging[#staging + 1] = key end
      end
    end
  end
  return staging
end

-- Whether none of these ids is in the store or comes twice, in few questions.
function store.all_new(q, ids)
  local names, own, keys, seen, unsure = all_bases(q), {q.base}, {}, {}, {}
  for _, id in ipairs(ids) do
    if seen[id] or homes[id] then return false end
    seen[id] = true
    if not absent[id] then unsure[#unsure + 1] = id end
  end
  local many = 2 * #unsure * #names > LOOKUPS
  if many then
    machine.need('many')
    store.look(unsure)
  end
  for _, id in ipairs(ids) do
    if many and not absent[id] then return false end
    local job, ended = 'job:' .. id, 'o:end:' .. id
    for _, base in ipairs(absent[id] and own or names) do
      local n = #keys
      keys[n + 1], keys[n + 2] = base .. job, base .. ended
    end
  end
  if exist(keys) then return false end
  for _, key in ipairs(#unsure > 0 and not many and all_staged(names) or {}) do
    for i = 1, #ids, PART do
      local last = math.min(i + PART - 1, #ids)
      local found = run('HMGET', key, unpack(ids, i, last))
      for n = 1, last - i + 1 do
        if found[n] then return false end
      end
    end
  end
  return true
end

local function is_known(q, id)
  return homes[id] or store.find(q, id) or store.occupied[slot(q, id)]
end

-- Rows from one number to another, each a transaction of its own.
local function publish(q, op, common, from, to, answers)
  local ids = {}
  for i = from, to, 3 do ids[#ids + 1] = op.rows[i] end
  local fresh = store.all_new(q, ids)
  for i = from, to, 3 do
    if not fresh and is_known(q, op.rows[i]) then
      answers[#answers + 1] = machine.transaction({expand(op, i)})
    else
      insert(q, op, common, i)
      answers[#answers + 1] = 1
    end
  end
end

-- All rows as one transaction.
local function publish_together(q, op, common)
  local rows, ids = op.rows, {}
  for i = 1, #rows, 3 do ids[#ids + 1] = rows[i] end
  local plain = store.all_new(q, ids)
  if not plain then
    plain = true
    for _, id in ipairs(ids) do plain = plain and not is_known(q, id) end
  end
  if not plain then
    local ops = {}
    for i = 1, #rows, 3 do ops[#ops + 1] = expand(op, i) end
    return machine.transaction(ops)
  end
  for i = 1, #rows, 3 do insert(q, op, common, i) end
  return {}
end

-- Tasks that differ in id, payload and fingerprint only, which `rows` holds. Together they are one transaction, or each is one.
-- Of those, a call answers only for as many as its budget allows: the caller sends the others anew.
function runs.enqueues(op)
  local q, answers, rows = queue(op.queue), {}, op.rows
  local common = {
    'state', 'wait', 'attempt', '0', 'created_ms', NOW, 'queued_ms', NOW, 'updated_ms', NOW,
    'first_started_ms', '', 'last_started_ms', '', 'completed_ms', '', 'failed_ms', '',
  }
  for _, value in ipairs(op.fields) do common[#common + 1] = value end
  if op.together then return publish_together(q, op, common) end
  for from = 1, #rows, 3 * SOME do
    if from > 1 and spent > BUDGET then break end
    publish(q, op, common, from, math.min(from + 3 * SOME - 1, #rows), answers)
  end
  return answers
end

local ACK = {
  'state', 'lease_token', 'lock_until_ms', 'gid', 'deps', 'cancel', 'o', 'created_ms', 'attempt', 'last_started_ms', 'worker',
  'due_ms',
}

local function ack(q, op, id, token, result, data)
  local v = run('HMGET', q.job .. id, unpack(ACK))
  if v[1] ~= 'active' or v[2] ~= token or text(v[4]) or v[5] == '1' or v[6] == '1' or not v[7] then return false end
  local own, _, ttl_ms, name = store.read_origin(v[7])
  local created = v[8]
  if not created or own ~= created or not moment(v[9]) or v[10] and string.find(v[10], '%D') then return false end
  if op.listed and name ~= '*' then return false end
  if ttl_ms == 0 or not (op.late or number(v[3]) > now) then return false end
  ttl_ms = ttl_ms or DEFAULT_TTL_MS
  run('HSET', q.job .. id, 'state', 'completed', 'lease_token', '', 'lock_until_ms', '', 'ended_by', token, 'completed_ms', NOW,
      'updated_ms', NOW)
  run('SET', q.o .. 'res:' .. id,
      '5 ' .. NOW .. ' ' .. v[9] .. ' ' .. (text(v[10]) or '-') .. ' ' .. created .. ' ' .. TEXT[#name] .. (result and ' 0 1 ' or ' 0 0 ')
        .. op.encoding .. '\n' .. name .. (result or ''),
      'PX', TEXT[ttl_ms + GRACE_MS])
  remove(q, 'active', id)
  remove(q, 'idx:active', id)
  add(q, 'o:done', op.listed and 'inf' or TEXT[now + ttl_ms], id)
  add(q, 'idx:completed', NOW, id)
  q.completed[#q.completed + 1] = id
  ended_tasks[#ended_tasks + 1] = id
  q.finished, q.changed, q.ahead[id] = true, true, true
  if request.events then
    local created_ms = number(created)
    local due_ms = text(v[12]) and ms(v[12]) or created_ms
    log.add(q, 'succeeded', id, name, false, number(v[9]), text(v[11]) or false, created_ms, due_ms, CODE.completed, data)
  end
  return true
end

-- Acks of one queue, each a transaction of its own.
function runs.acks(op)
  local q, answers, rows, ids = queue(op.queue), {}, op.rows, {}
  for i = 1, #rows, 4 do ids[#ids + 1] = rows[i] end
  local leased = store.leased(q, ids)
  for i = 1, #rows, 4 do
    local id, token, result, data = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    if leased[(i + 3) / 4] and cache[slot(q, id)] == nil and ack(q, op, id, token, result, data) then
      answers[#answers + 1] = 1
    else
      answers[#answers + 1] = machine.transaction({{
        kind = 'ack', queue = op.queue, id = id, token = token, late = op.late, encoding = op.encoding, result = result or nil,
        data = data, listed = op.listed,
      }})
    end
  end
  return answers
end

-- The lease of a plain task from its values; nil for any other.
function machine.lease_plain(q, id, op, values)
  if values[4] or values[7] or values[2] ~= '0' or not values[9] or cache[slot(q, id)] then return nil end
  local own, _, _, name = store.read_origin(values[9])
  if own ~= values[5] then return nil end
  local timeout_ms = op.lease or ms(values[3])
  if timeout_ms <= 0 then timeout_ms = DEFAULT_LEASE_MS end
  local until_ms = TEXT[now + timeout_ms]
  run('HSET', q.job .. id, 'state', 'active', 'attempt', '1', 'lease_token', op.token, 'lock_until_ms', until_ms,
      'first_started_ms', text(values[8]) or NOW, 'last_started_ms', NOW, 'updated_ms', NOW, 'worker', op.worker)
  values[1], values[2], values[7], values[10] = until_ms, '1', false, id
  cache[slot(q, id)], q.ahead[id] = nil, true
  q.changed = true
  remove(q, 'idx:wait', id)
  add(q, 'active', until_ms, id)
  add(q, 'idx:active', NOW, id)
  if request.events then
    local created_ms = number(values[5])
    local due_ms = text(values[6]) and ms(values[6]) or created_ms
    log.add(q, 'started', id, name, false, 1, text(op.worker) or false, created_ms, due_ms, CODE.active, false)
  end
  return true
end
